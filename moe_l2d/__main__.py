"""python -m moe_l2d"""

import sys

from moe_l2d.main import main

sys.exit(main())
