"""OpenAI's requests and responses: over HTTP, and in batches from files."""
