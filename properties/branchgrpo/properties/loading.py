"""Implementations by name: ``module:Object``, with arguments after commas."""

import importlib
from ast import literal_eval

import torch

from branchgrpo.properties.subject import CPU, Subject
from branchgrpo.reference.errors import OptionError


def parse_argument(text: str) -> tuple[str, object]:
    """``name=value``; the value of ``device`` is a device, any other a Python literal."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise OptionError("implementation argument", text, "name=value")
    if name == "device":
        return name, torch.device(value)
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError):
        raise OptionError(f"implementation argument {name}", value, "a Python literal") from None


def load_object(name: str) -> object:
    """The object behind ``module:Object``."""
    module, separator, attribute = name.partition(":")
    if not separator:
        raise OptionError("implementation", name, "module:Object")
    return getattr(importlib.import_module(module), attribute)


def load_subject(text: str) -> Subject:
    """An implementation from ``module:Class,argument=value,…``; a ``device`` argument also places the models.

    Raises:
        OptionError: another form, or an object that is not callable.
    """
    name, *arguments = text.split(",")
    keywords = dict(parse_argument(argument) for argument in arguments)
    factory = load_object(name)
    if not callable(factory):
        raise OptionError("implementation", text, "a class or function that makes an implementation")
    device = keywords.get("device", CPU)
    assert isinstance(device, torch.device)
    return Subject(factory(**keywords), device)
