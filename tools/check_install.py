"""What `make install` says at its end: nothing, or that plain `import torchvision` fails here and what to do."""

import importlib
from importlib.metadata import version


def problem() -> str:
    """Two lines if torchvision is installed and its import fails; else ""."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return ""
    except (RuntimeError, OSError, ImportError) as error:
        return (
            f"Plain `import torchvision` and `import timm` fail beside torch {version('torch')}: "
            f"{' '.join(str(error).split())}. mnemos works; in your code call mnemos.libraries.torchvision() or "
            "mnemos.libraries.timm() first.\n"
            "For plain imports install torch and torchvision from one index, both for CPUs or both for CUDA: "
            'docs/install.md, "If torchvision does not fit".'
        )
    return ""


if __name__ == "__main__" and (said := problem()):
    print(said)
