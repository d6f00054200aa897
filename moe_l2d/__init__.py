"""moe-l2d: serves mixture-of-experts language models through a supervised llama-server."""

__version__ = "0.1.0"
