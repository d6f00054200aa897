"""python -m moe_l2ctl"""

import sys

from moe_l2ctl.main import main

sys.exit(main())
