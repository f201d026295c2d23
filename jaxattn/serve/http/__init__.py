"""`jaxattn serve`: the HTTP server."""
