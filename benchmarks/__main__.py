"""`python -m benchmarks`: every benchmark, one table."""

from rich.console import Console
from rich.table import Table

from benchmarks import copying, planning, scheduling, serving, simulator


def main() -> None:
    """Run all and print what each measured against what."""
    table = Table("benchmark", "measured", "against", "ratio", "wanted", title="Ratios taken in one run")
    console = Console()
    for module in (copying, planning, scheduling, simulator, serving):
        with console.status(f"{module.__name__} ..."):
            for row in module.rows():
                table.add_row(*row)
    console.print(table)


main()
