"""The same methods over other globals: how a subclass replaces functions that its base calls by name.

A method finds the functions it calls in the globals of its module. To replace some of them for one class, and leave
the module as it is, the method is made again from the same code, over a live view of those globals in which the names
are bound to others. The subclass overrides the method by that; everything else it inherits.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Globals(dict[str, Any]):
    """A module's globals, seen live, with some names replaced."""

    def __init__(self, replaced: Mapping[str, Any], module: dict[str, Any]) -> None:
        super().__init__(replaced, __builtins__=module["__builtins__"])
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]


class Rebinding:
    """Makes functions and classes again with some functions and classes replaced, found by identity.

    Args:
        replaced: what is replaced, by what.
        marking: those of `replaced` that mark a method: it is given to `wrap`.
        wrap: put around each method that uses something of `marking`.
    """

    def __init__(self, replaced: Mapping[Any, Any], marking: frozenset[Any], wrap: Wrap) -> None:
        self._replaced = replaced
        self._marking = marking
        self._wrap = wrap
        self._subclasses: dict[type, type] = {}
        self._entered: set[int] = set()

    @property
    def made(self) -> set[type]:
        """The subclasses made so far."""
        return {made for cls, made in self._subclasses.items() if made is not cls}

    def callable(self, runnable: Any) -> Any:
        """A function, a `functools.partial` or a bound method, made again; anything else as it is."""
        if runnable in self._replaced:
            return self._replaced[runnable]
        if isinstance(runnable, functools.partial):
            return functools.partial(self.callable(runnable.func), *runnable.args, **runnable.keywords)
        if isinstance(runnable, types.MethodType):
            new, _ = self._function(runnable.__func__)
            return types.MethodType(new, runnable.__self__) if new is not None else runnable
        new, _ = self._function(runnable)
        return new if new is not None else runnable

    def subclass(self, cls: type) -> type:
        """A subclass of `cls` with the methods made again that `cls` itself and each of its bases define.

        A base's methods are placed after `cls` and before the base, so that `super()` in `cls` finds them. Where there
        is nothing to replace, this is `cls` itself.
        """
        if cls not in self._subclasses:
            self._subclasses[cls] = self._subclass(cls)
        return self._subclasses[cls]

    def _subclass(self, cls: type) -> type:
        bases = tuple(new for base in cls.__bases__ if (new := self.subclass(base)) is not base)
        methods = self._methods(cls)
        if not methods and not bases:
            return cls
        namespace = {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        if not any("__dict__" in vars(base) for base in cls.__mro__):
            namespace["__slots__"] = ()
        return types.new_class(cls.__name__, (cls, *bases), exec_body=lambda body: body.update(namespace))

    def in_place(self, cls: type) -> None:
        """Put the methods that `cls` itself defines, made again, in their place: for a class that is ours."""
        for name, new in self._methods(cls).items():
            setattr(cls, name, new)

    def _methods(self, cls: type) -> dict[str, Any]:
        made = ((name, self._member(name, value)) for name, value in vars(cls).items())
        return {name: new for name, new in made if new is not None}

    def _member(self, name: str, value: Any) -> Any:
        if isinstance(value, (staticmethod, classmethod)):
            new, _ = self._function(value.__func__)
            return type(value)(new) if new is not None else None
        new, marked = self._function(value)
        return self._wrap(new) if new is not None and marked and name != "__init__" else new

    def _function(self, function: Any) -> tuple[Any, bool]:
        """`function` made again, or None if it (or what it decorates) uses nothing that is replaced; whether marked."""
        if not isinstance(function, types.FunctionType) or id(function) in self._entered:
            return None, False
        self._entered.add(id(function))  # a function may be in its own closure
        try:
            return self._made_again(function)
        finally:
            self._entered.discard(id(function))

    def _made_again(self, function: types.FunctionType) -> tuple[Any, bool]:
        module = function.__globals__
        found = {name: module[name] for name in _names(function.__code__) if _is_replaceable(module.get(name))}
        replaced = {name: self._replaced[value] for name, value in found.items() if value in self._replaced}
        marked = any(found[name] in self._marking for name in replaced)
        # A decorated method is in its wrapper's closure.
        old_cells = function.__closure__ or ()
        cells = [self._cell(cell) for cell in old_cells]
        if not replaced and not any(new for new, _ in cells):
            return None, False
        closure = tuple(new or old for (new, _), old in zip(cells, old_cells, strict=True))
        scope = _Globals(replaced, module) if replaced else module
        new = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
        new.__kwdefaults__ = function.__kwdefaults__
        return functools.update_wrapper(new, function), marked or any(marked for _, marked in cells)

    def _cell(self, cell: types.CellType) -> tuple[types.CellType | None, bool]:
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell
            return None, False
        if _is_replaceable(content) and content in self._replaced:
            return types.CellType(self._replaced[content]), content in self._marking
        new, marked = self._function(content)
        return (types.CellType(new), marked) if new is not None else (None, False)


def _is_replaceable(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, type))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
