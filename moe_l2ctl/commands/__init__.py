"""One module a command: register() adds its parser and sets `run`, METHODS names the rows of the API it calls."""
