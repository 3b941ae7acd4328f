# SPDX-License-Identifier: Apache-2.0
"""The parser of the example scripts: TRL's, with errors that name what is wrong and the value that was meant."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from omnitrl.errors import InputError, did_you_mean


class OmniParser(TrlParser):
    """
    Reads dataclasses from the command line and from a YAML file, as [`~trl.TrlParser`] does, and lets no mistake pass.

    Beyond TRL's parser it

    - refuses unknown keys of the file and unknown options with the nearest one that exists,
    - checks the values of the file against the type of their field, where TRL checks the command line alone,
    - refuses a key that stands twice in the file,
    - takes no abbreviated options, so that `--learning_rat` is a mistake and not `--learning_rate`,
    - accepts `--config=FILE` as well as `--config FILE`.

    Args:
        dataclass_types (`type` or `Iterable[type]`, *optional*):
            Dataclasses whose fields become options.
        **kwargs:
            Passed on to [`~trl.TrlParser`].

    Raises:
        [`~omnitrl.errors.InputError`]: on parsing, for all of the above and for whatever argparse refuses.

    Example:

    ```python
    >>> from omnitrl import FlowGRPOConfig
    >>> from omnitrl.cli.parser import OmniParser
    >>> parser = OmniParser(FlowGRPOConfig)
    >>> (args,) = parser.parse_args_and_config(["--output_dir", "out", "--noise_levl", "0.7"])
    InputError: Unknown option --noise_levl. Did you mean '--noise_level'?
    ```
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(dataclass_types, **kwargs)
        self._refuse_unknown = True
        self._config_path = ""

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """
        Parses options, with the values of a file as their defaults where `--config FILE` names one.

        Args:
            args (`Iterable[str]`, *optional*, defaults to the arguments of the process):
                The options.
            return_remaining_strings (`bool`, *optional*, defaults to `False`):
                Whether unknown options and keys are returned, as the last element, and not refused.
            fail_with_unknown_args (`bool`, *optional*, defaults to `True`):
                Whether unknown keys of the file are refused.
            separate_remaining_strings (`bool`, *optional*, defaults to `False`):
                Whether those of the file and those of the command line are returned apart.

        Returns:
            `tuple`: an instance of each dataclass, in the order they were given.
        """
        args = self._split_config_flag(list(sys.argv[1:] if args is None else args))
        self._refuse_unknown = fail_with_unknown_args and not return_remaining_strings
        if "--config" in args:
            self._config_path = args[args.index("--config") + 1]
            self._check_file(Path(self._config_path))
        return super().parse_args_and_config(
            args, return_remaining_strings, fail_with_unknown_args, separate_remaining_strings
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, but refuses what is left over before any dataclass is made, whose own check would hide it."""
        parsed, remaining = super().parse_known_args(args, namespace)
        if remaining and self._refuse_unknown:
            unknown = next((word for word in remaining if word.startswith("--")), remaining[0]).split("=")[0]
            spelt = "--" + unknown.removeprefix("--").replace("-", "_")  # each option exists in both spellings
            options = [option for option in self._option_string_actions if "-" not in option[2:]]
            raise InputError(f"Unknown option {unknown}.{did_you_mean(spelt, options)}")
        return parsed, remaining

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """As TRL's, but refuses unknown keys and values that do not fit their field."""
        actions: dict[str, argparse.Action] = {}
        for action in self._actions:
            actions.setdefault(action.dest, action)  # the first of a flag and its --no_ twin has the type
        actions.pop("help", None)
        for key, value in kwargs.items():
            if key in actions:
                kwargs[key] = self._checked(actions[key], value)
            elif self._refuse_unknown:
                raise InputError(f"{self._config_path} has an unknown key {key!r}.{did_you_mean(key, actions)}")
        return super().set_defaults_with_config(**kwargs)

    def error(self, message: str) -> NoReturn:
        """Raises what argparse found, where argparse would print a page of usage and exit."""
        raise InputError(f"{message[0].upper()}{message[1:]} (--help lists the options).")

    def _split_config_flag(self, args: list[str]) -> list[str]:
        split = []
        for word in args:
            split += ["--config", word.removeprefix("--config=")] if word.startswith("--config=") else [word]
        if split.count("--config") > 1:
            raise InputError("--config stands twice, but one file is read: put everything into one.")
        if split and split[-1] == "--config":
            raise InputError("--config needs the path of a YAML file, for example --config train.yaml.")
        return split

    def _check_file(self, path: Path) -> None:
        """Refuses what cannot be read as one mapping with each key once."""
        try:
            node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except OSError as error:
            raise InputError(f"--config {path} cannot be read: {error.strerror}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f"{path} must be a YAML mapping, with lines such as learning_rate: 1e-4.")
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise InputError(
                    f"{path} has the key {key.value!r} twice, the second time in line {key.start_mark.line + 1}: "
                    "keep one of them."
                )
            seen.add(key.value)

    def _checked(self, action: argparse.Action, value: Any) -> Any:
        """A value of the file as the command line would have given it."""
        if value is None:
            return None
        if action.nargs != "+":
            return self._checked_one(action, value)
        if not isinstance(value, list):
            raise InputError(
                f"{self._config_path}: {action.dest} must be a list, got {value!r}: write {action.dest}: [{value}]."
            )
        return [self._checked_one(action, item) for item in value]

    def _checked_one(self, action: argparse.Action, value: Any) -> Any:
        where = f"{self._config_path}: {action.dest}"
        if isinstance(value, bool) and (action.type is str or action.choices is not None):
            word = "yes" if value else "no"
            raise InputError(
                f"{where} must be a word, but YAML reads yes, no, on and off as booleans: write "
                f'{action.dest}: "{word}".'
            )
        # A bool is an int to Python, but not to somebody who writes `num_generations: true`.
        if isinstance(action.type, type) and isinstance(value, action.type) and not isinstance(value, bool):
            converted = value
        else:
            converted = self._converted(action, value, where)
        if action.choices is not None and converted not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise InputError(
                f"{where} must be one of {', '.join(choices)}, got {value!r}.{did_you_mean(str(value), choices)}"
            )
        return converted

    def _converted(self, action: argparse.Action, value: Any, where: str) -> Any:
        if not callable(action.type):
            return value
        try:
            converted = action.type(str(value))
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise InputError(f"{where} cannot be {value!r} ({error}).") from error
        except TypeError:  # a type hint that is no function, such as a union: TRL leaves its values alone as well
            return value
        return converted if isinstance(value, (str, int, float)) else value
