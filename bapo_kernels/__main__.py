"""``python -m bapo_kernels``: versions and backends; with a command, validation or a profile."""

from .tools.cli import main

if __name__ == "__main__":
    main()
