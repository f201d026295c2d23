"""OpenAI's request and response bodies, for the server and for batch files."""
