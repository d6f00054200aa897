"""The public side: HTTP on TCP, in OpenAI's shapes."""
