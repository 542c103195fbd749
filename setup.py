"""A wheel with a compiled library (`make wheel`) is one of this Python and platform; the rest: pyproject.toml."""

from pathlib import Path

from setuptools import Distribution, setup


class _Distribution(Distribution):
    def has_ext_modules(self) -> bool:
        return any(Path(__file__).parent.glob("runtime/native/prebuilt/*.so"))


setup(distclass=_Distribution, script_name="setup.py")  # by this name it stays out of the wheel
