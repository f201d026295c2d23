"""What is wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or holds what it should not; nothing is loaded."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint of a model, or with an option, that this implementation does not have."""
