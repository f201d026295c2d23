"""What is wrong with a request, where a program may ask which."""


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a new token."""
