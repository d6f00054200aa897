"""moe-l2ctl: controls and inspects a running moe-l2d."""
