"""``python -m bapo_kernels``: versions and backends, with the reason for each absent one."""

from .debug import environment


def main() -> None:
    """Prints the report."""
    for name, value in environment().items():
        print(f"{name:<18}{value}")


if __name__ == "__main__":
    main()
