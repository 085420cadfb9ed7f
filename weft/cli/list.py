"""`weft list`: the recipes, the data sets and the extras."""

from weft.cli.options import Json

__all__ = ["list_all"]


def list_all(json: Json = False) -> None:
    """List the recipes, the data sets and the extras."""
    from weft.cli.inventory import render_inventory
    from weft.cli.output import print_json, print_tables
    from weft.engines.environment import check_extras
    from weft.recipes import BUILT_IN
    from weft.training.datasets import DATASETS, locate

    recipes = {name: make().description for name, make in BUILT_IN.items()}
    datasets, extras = [locate(name) for name in DATASETS], check_extras()
    if json:
        print_json({"recipes": recipes, "datasets": datasets, "extras": extras})
    else:
        print_tables(render_inventory(recipes, datasets, extras))
