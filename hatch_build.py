"""The install's hook: builds the native kernels into the package where a C++ compiler is, and goes on without one."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    """A wheel is of this platform if the kernels were built into it, and pure Python otherwise."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and say in one line how it went."""
        builder = _builder(Path(self.root, "src", "mnemos", "native", "build.py"))
        try:
            library = builder.build()
        except builder.BuildError as error:
            self.app.display_warning(f"mnemos: native kernels not built ({error}); the PyTorch path serves instead")
            return
        self.app.display_info(f"mnemos: built {library.name} with {' '.join(builder.compiler())}")
        if version != "editable":
            build_data["force_include"][str(library)] = f"mnemos/native/{library.name}"
        # No part of Python's or PyTorch's own interface is in it: one wheel does for all of their versions.
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{builder.target()[0]}"


def _builder(path: Path) -> Any:
    """build.py by itself: mnemos cannot be imported here."""
    spec = importlib.util.spec_from_file_location("mnemos_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
