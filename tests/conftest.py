import contextlib
import io
import os
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ['HF_HUB_OFFLINE'] = '1'     # the tests reach for no network
torch.set_num_threads(1)        # tiny shapes: a second thread only waits

from model import GPT, GPTConfig  # noqa: E402

# thresholds at which the tokens of the tiny model stop at different steps
TAUS = dict(norm=0.3, norm_rel=0.08, kl=3e-4, accel=0.3, accel_hat=0.65, accel_rel=0.08)


def run(*args, script='train.py'):
    """A script as __main__, in this process: stdout, stderr and returncode as subprocess.run has them (test_cli.py runs the real thing)."""
    out, error, code, before = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = [script, *args]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            runpy.run_path(os.path.join(ROOT, script), run_name='__main__')
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = before
    return SimpleNamespace(stdout=out.getvalue(), stderr=error.getvalue(), returncode=code)


@pytest.fixture
def tiny():
    """tiny(**changes): a small model in evaluation, weights from a fixed seed, norms off their initial ones."""
    def build(seed=0, **changes):
        torch.manual_seed(seed)
        args = dict(block_size=16, vocab_size=50, n_layer=5, n_head=2, n_embd=16, groups=[[1], [2, 3]], mean_recurrence=3)
        model = GPT(GPTConfig(**args | changes))
        for p in model.parameters():
            if p.dim() == 1:
                torch.nn.init.normal_(p, 1.0, 0.1)
        return model.eval()
    return build


@pytest.fixture
def idx():
    return torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(1))
