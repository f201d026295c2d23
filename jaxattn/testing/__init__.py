"""What a backend is held to: batches on pages, what they must give, and the suite that asks."""

from jaxattn.testing.conformance import check_backend as check_backend
