#!/bin/sh
# Weights & Biases writes its files into ./wandb, or where WANDB_DIR says. Where the library is not installed, Python
# takes that folder for a package without code: `import wandb` succeeds in every script that is started beside it, and
# what fails, later and elsewhere, is `wandb.init`. So to ask whether wandb can be imported, or found, does not tell
# whether it is installed. A module that is installed has an origin; the folder has none.
#
# Version: wandb 0.31.0, Python 3.11.7. Expected: ModuleNotFoundError. Seen:
#   without the library: import succeeds, has init: False, origin: None
# Exits 0 while the behaviour is as described, and 1 once it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" wandb==0.31.0
cd "$folder"
WANDB_MODE=offline WANDB_SILENT=true PYTHONPATH="$folder/packages" python3 -c "
import wandb
wandb.init(project='one').finish()"
env -u PYTHONPATH python3 - <<'PYTHON'
import importlib.util
import sys

try:
    import wandb
except ModuleNotFoundError as error:
    print("without the library:", error)
    sys.exit(1)
origin = importlib.util.find_spec("wandb").origin
print(f"without the library: import succeeds, has init: {hasattr(wandb, 'init')}, origin: {origin}")
sys.exit(0 if origin is None and not hasattr(wandb, "init") else 1)
PYTHON
