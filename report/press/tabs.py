"""Tabs: several pictures of which a reader chooses one, the same in JupyterLab and on a page."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count, product
from typing import Any

from press.columns import column, read
from press.plots import Picture

MOST_TABS = 6
_CALLS = count(1)


@dataclass(frozen=True)
class Tabs:
    """Pictures of which a reader chooses one: radio buttons and CSS, without JavaScript."""

    choices: Mapping[str, Sequence[Any]]
    pictures: Sequence[Picture]

    def html(self) -> str:
        """As HTML, whose ids no other call gives."""
        content = repr((next(_CALLS), *(picture.alt for picture in self.pictures)))
        own = f"tabs-{hashlib.sha256(content.encode()).hexdigest()[:10]}"
        fields, panes, rules = [], [], []
        for at, (name, values) in enumerate(self.choices.items()):
            buttons = "".join(
                f'<label style="margin-right: 1em"><input type="radio" name="{own}-{at}" '
                f'id="{own}-{at}-{n}"{"" if n else " checked"}> {escape(read(name, value))}</label>'
                for n, value in enumerate(values)
            )
            fields.append(
                '<fieldset style="border: 0; padding: 0; margin: 0">'
                f'<legend style="float: left; margin-right: 1em">{escape(column(name).label)}'
                f"</legend>{buttons}</fieldset>"
            )
        places = product(*(range(len(values)) for values in self.choices.values()))
        for number, (place, picture) in enumerate(zip(places, self.pictures, strict=True)):
            chosen = "".join(f":has(#{own}-{at}-{n}:checked)" for at, n in enumerate(place))
            rules.append(f"#{own}{chosen} > .p{number} {{ display: block }}")
            said = ", ".join(
                read(name, values[n])
                for (name, values), n in zip(self.choices.items(), place, strict=True)
            )
            data = base64.b64encode(picture.svg.encode()).decode()
            panes.append(
                f'<figure class="p{number}" style="margin: 0; background: white">'
                f"<figcaption>{escape(said)}</figcaption>"
                f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.alt)}"></figure>'
            )
        # A browser that does not know :has, or a page without styles, shows all with what they are.
        hidden = f"#{own} > figure, #{own} figcaption {{ display: none }}"
        css = f"@supports selector(:has(*)) {{ {hidden} {' '.join(rules)} }}"
        return f'<div id="{own}"><style>{css}</style>{"".join(fields)}{"".join(panes)}</div>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[Any, Any]:
        data, metadata = self.pictures[0]._repr_mimebundle_()
        return {"text/html": self.html(), **data}, metadata


def tabs(draw: Callable[..., Picture], **choices: Sequence[Any]) -> Tabs:
    """A picture a combination of choices, of which a reader sees one at a time, the first at first.

        tabs(lambda machine: dots(rows[rows["machine"] == machine], "ratio", "model"),
             machine=["H200", "H100"])

    Args:
        draw: takes a value of each choice by its name and gives a picture.
        choices: a column's name and the values that are offered.

    Raises:
        ValueError: nothing to choose, or more than six combinations.
    """
    combinations = list(product(*choices.values()))
    if not choices or not combinations:
        raise ValueError('tabs take choices with values, as machine=["H200", "H100"]')
    if len(combinations) > MOST_TABS:
        raise ValueError(
            f"{len(combinations)} combinations of {', '.join(choices)} are more than {MOST_TABS}: "
            "offer fewer values, or give one of them panels"
        )
    return Tabs(choices, [draw(**dict(zip(choices, c, strict=True))) for c in combinations])
