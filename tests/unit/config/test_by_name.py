"""Classes by name: what cannot be imported, is none, or does not take its options is one clear error."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import pytest

from vllm_specrollout.config import by_name, parse
from vllm_specrollout.config.checks import Range
from vllm_specrollout.errors import ConfigError


class Speaker(Protocol):
    name: str
    voice: str

    def speak(self) -> str: ...


class Base:
    voice = "low"


class Parrot(Base):
    def __init__(self, place: int, *, words: tuple[Annotated[int, Range(1, 9)], ...], twice: bool = False, free=None):
        if free == "fails":
            raise OSError("no seed")
        self.given = place, words, twice, free

    def speak(self) -> str:
        return "hello"


class Mute(Base): ...


class Voiceless:
    def speak(self) -> str:
        return ""


def make(name: str, **options: Any) -> Any:
    return by_name.make("speaker", name if ":" in name else f"{__name__}:{name}", Speaker, Base, (7,), options)


def test_it_is_made_with_its_place_and_its_options():
    assert make("Parrot", words=[1, 2], free={"any": 1}).given == (7, (1, 2), False, {"any": 1})


@pytest.mark.parametrize(
    ("name", "options", "cause", "way"),
    [
        ("Parrot", {}, "does not give .* its option `words`", "add `words`"),
        ("Parrot", {"words": 3}, "words` is 3, not a list", r"\[3\]"),
        ("Parrot", {"words": [10]}, "words` is 10, outside 1 to 9", "from 1 to 9"),
        ("Parrot", {"words": [], "twice": 1}, "twice` is 1, of type int", "of type bool"),
        ("Parrot", {"words": [], "twise": True}, "`twise` that it does not take", "did you mean `twice`"),
        ("Parrot", {"words": [], "free": "fails"}, "cannot be made: OSError: no seed", "then options by keyword"),
        ("Mute", {}, "which has no `speak`", "inherit from `.*Base`"),
        ("Voiceless", {}, "cannot be made: TypeError", "Base's says"),
        ("pytest", {}, "which is no class", "my.module:Class"),
        ("Unknown", {}, "cannot be imported: AttributeError", "PYTHONPATH"),
        ("no_such.module:Speaker", {}, "`no_such.module:Speaker`, which cannot be imported", "PYTHONPATH"),
    ],
)
def test_what_cannot_be_made_says_why_and_what_to_do(name, options, cause, way):
    with pytest.raises(ConfigError) as caught:
        make(name, **options)
    assert caught.match(f"speaker.*{cause}(?s:.*)hint: .*{way}")


@pytest.mark.parametrize("key", ["drafters", "budget"])
@pytest.mark.parametrize("name", [":", "a:", ":b", "a b:c", "a:b:c", "a.:b", "os;x:y"])
def test_a_name_that_can_be_no_class_is_refused_before_anything_is_imported(key, name):
    with pytest.raises(ConfigError, match=f"`{key}` names .*no class(?s:.*)my.module:Class"):
        parse({key: name if key == "budget" else [name]})


def test_options_stand_beside_the_name_and_only_beside_that_of_a_class():
    config = parse({"drafters": ["ngram", {"name": "a.b:C", "levels": 3}], "budget": {"name": "d:E", "k": 1}})
    assert config is not None
    assert (config.drafters, config.budget) == (("ngram", "a.b:C"), "d:E")
    assert config.drafter_options == {"a.b:C": {"levels": 3}}
    assert config.as_dict()["drafters"] == ["ngram", {"name": "a.b:C", "levels": 3}]
    assert config.as_dict()["budget"] == {"name": "d:E", "k": 1}
    with pytest.raises(ConfigError, match="gives `ngram` options beside its name(?s:.*)under its own key"):
        parse({"drafters": [{"name": "ngram", "min_match": 2}]})
