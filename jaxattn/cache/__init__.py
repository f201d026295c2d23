"""The paged KV cache: which layers store together, and who owns which page."""
