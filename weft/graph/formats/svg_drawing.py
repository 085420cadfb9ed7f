"""A graph drawn as SVG: inputs and operators in layers, each below all that it reads.

    layer 0   inputs and constants
    layer n   operators whose deepest input is in layer n - 1

Within a layer, boxes stand near the mean place of what they read. An edge is a variable; its name, type and shape show
when the pointer rests on it.
"""

from collections.abc import Mapping
from html import escape

from weft.graph.formats.graph_text import type_of
from weft.graph.ir.graph import Graph, Operator, Role, Variable

__all__ = ["svg_of"]

COLOURS: Mapping[Role, str] = {
    "state": "#d9d9d9",
    "batch": "#f2f2f2",
    "constant": "#ffffff",
    "forward": "#cfe3f7",
    "backward": "#fbdcc4",
    "update": "#d3ecd0",
    "communication": "#ecd0ec",
}
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _LEGEND = 150, 34, 18, 44, 30  # pixels

Box = Operator | Variable
Place = tuple[float, float]


def svg_of(graph: Graph) -> str:
    """A graph as the text of an SVG file: `Path("step.svg").write_text(svg_of(graph))`."""
    layers = _layers(graph)
    width = max([len(COLOURS), *map(len, layers)]) * (_WIDTH + _GAP_X) + _GAP_X
    height = len(layers) * (_HEIGHT + _GAP_Y) + _LEGEND + _GAP_Y
    places = _places(layers, width)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        *_legend(),
        *(_edge(variable, places) for variable in graph.variables.values()),
        *(_box(box, places[box]) for layer in layers for box in layer),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _layers(graph: Graph) -> list[list[Box]]:
    sources: list[Box] = [variable for variable in graph.variables.values() if variable.owner is None]
    depths: dict[Operator, int] = {}
    layers = [sources]
    for operator in graph.operators:
        owners = [variable.owner for variable in operator.inputs]
        depth = 1 + max((depths[owner] for owner in owners if owner is not None), default=0)
        depths[operator] = depth
        if depth == len(layers):
            layers.append([])
        layers[depth].append(operator)
    return layers


def _places(layers: list[list[Box]], width: float) -> dict[Box, Place]:
    """The top left corner of every box."""
    places: dict[Box, Place] = {}
    for depth, layer in enumerate(layers):
        if depth:
            layer.sort(key=lambda box: _mean_x(box, places))
        left = (width - len(layer) * (_WIDTH + _GAP_X) + _GAP_X) / 2
        for i, box in enumerate(layer):
            places[box] = (left + i * (_WIDTH + _GAP_X), _LEGEND + _GAP_Y / 2 + depth * (_HEIGHT + _GAP_Y))
    return places


def _mean_x(box: Box, places: Mapping[Box, Place]) -> float:
    sources = [places[variable.owner or variable][0] for variable in getattr(box, "inputs", ())]
    return sum(sources) / len(sources) if sources else 0.0


def _legend() -> list[str]:
    parts = []
    for i, (role, colour) in enumerate(COLOURS.items()):
        x = _GAP_X + i * (_WIDTH + _GAP_X)
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}" stroke="#666"/>')
        parts.append(f'<text x="{x + 18}" y="18">{role}</text>')
    return parts


def _box(box: Box, place: Place) -> str:
    x, y = place
    title, below = (box.target, box.name) if isinstance(box, Operator) else (box.path or box.name, type_of(box))
    note = f"{title} {getattr(box, 'line', '')}".strip()
    return (
        f'<g><title>{escape(note)}</title><rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" '
        f'fill="{COLOURS[box.role]}" stroke="#666"/>'
        f'<text x="{x + 6:g}" y="{y + 14:g}">{escape(_short(title))}</text>'
        f'<text x="{x + 6:g}" y="{y + 28:g}" fill="#666">{escape(_short(below))}</text></g>'
    )


def _edge(variable: Variable, places: Mapping[Box, Place]) -> str:
    x1, y1 = places[variable.owner or variable]
    lines = [
        f'<line x1="{x1 + _WIDTH / 2:g}" y1="{y1 + _HEIGHT:g}" x2="{x2 + _WIDTH / 2:g}" y2="{y2:g}" stroke="#999"/>'
        for x2, y2 in (places[reader] for reader in variable.readers)
    ]
    return f"<g><title>{escape(f'{variable.name} {type_of(variable)}')}</title>{''.join(lines)}</g>"


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"…{text[-23:]}"
