"""`jaxattn batch --ray`: files of requests, on the workers of a Ray cluster."""
