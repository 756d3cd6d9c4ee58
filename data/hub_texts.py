"""Text read from the Hub through `datasets`, streamed: WikiText-2 raw and C4 English."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HubCorpus:
    """A data set on the Hub: repository, configuration, splits, and the default split of each side."""

    path: str
    name: str
    splits: tuple[str, ...]
    default_split: dict[str, str]


HUB_CORPORA = {
    "wikitext": HubCorpus(
        path="Salesforce/wikitext",
        name="wikitext-2-raw-v1",
        splits=("train", "validation", "test"),
        default_split={"train": "train", "test": "test"},
    ),
    "c4": HubCorpus(
        path="allenai/c4",
        name="en",
        splits=("train", "validation"),
        default_split={"train": "train", "test": "validation"},
    ),
}


def hub_texts(name: str, split: str) -> Iterator[str]:
    """The text of each row of HUB_CORPORA[name]; ConnectionError, in one line, if it cannot be read."""
    import datasets  # here: it takes a second to import, and no other corpus needs it

    hub = HUB_CORPORA[name]
    try:
        for row in datasets.load_dataset(hub.path, hub.name, split=split, streaming=True):
            yield row["text"]
    except (OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"corpus {name}:{split}: cannot read {hub.path} from the Hub ({reason}); "
            "check the network, or give a local .txt or .jsonl file, or self"
        ) from error
