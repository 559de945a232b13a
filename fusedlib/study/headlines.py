"""Each study in a sentence or two, of which the abstract and the README's list are made."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pandas as pd

from fusedlib.bench import results
from fusedlib.study.anatomy import findings as anatomy
from fusedlib.study.attention import findings as attention
from fusedlib.study.end_to_end import findings as end_to_end
from fusedlib.study.kernels import findings as kernels
from fusedlib.study.memory import findings as memory
from fusedlib.study.model_memory import findings as model_memory
from fusedlib.study.precision import findings as precision
from fusedlib.study.profiles import findings as profiles
from fusedlib.study.running import config
from fusedlib.study.training import findings as training
from fusedlib.study.warmup import findings as warmup

Sentences = Callable[[pd.DataFrame], list[str]]


@dataclass(frozen=True)
class Headline:
    """What a study says of itself.

    Attributes:
        sentences: made of its rows, the most telling first.
        count: how many of them the abstract takes.
        short: what the README says instead, where its table has the first one already.
    """

    sentences: Sentences
    count: int = 2
    short: Sentences | None = None


HEADLINES = {
    "01_warmup": Headline(warmup.headline),
    "02_precision": Headline(precision.headline),
    "03_kernels": Headline(kernels.headline, 3, kernels.room),
    "04_memory": Headline(memory.headline),
    "05_anatomy": Headline(anatomy.headline, 3),
    "06_end_to_end": Headline(end_to_end.headline),
    "07_attention": Headline(attention.headline),
    "08_profile": Headline(profiles.headline),
    "09_model_memory": Headline(model_memory.headline),
    "10_mnist": Headline(training.headline),
}


def abstract() -> Iterator[str]:
    """A paragraph of Markdown a study, in the report's order, from all rows there are."""
    for study in config.load().studies:
        headline = HEADLINES[study.name]
        said = headline.sentences(results.load(study.name))[: headline.count]
        yield " ".join([f"**{study.title}.**", *said])
