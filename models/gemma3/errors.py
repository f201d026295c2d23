"""What is wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or holds what it should not; nothing is loaded."""
