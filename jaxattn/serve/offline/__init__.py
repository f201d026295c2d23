"""`jaxattn batch`: files of requests, in this process."""
