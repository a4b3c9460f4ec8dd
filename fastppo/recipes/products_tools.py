"""The tools of the recipe `smollm2-tools`. Copied into its folder, to be changed."""


class Products:
    """A class of TRL's `environment_factory`: its public methods are tools."""

    def reset(self, **row: object) -> None:
        """The prompt is read as it is."""

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: One number.
            b: The other.
        """
        return a * b
