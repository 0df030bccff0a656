"""Posterior files damaged at random: refused by an MCBNError that names the file, or exactly what was saved."""

import random
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

import mcbn
from kinds import make
from mcbn.saving import CHECKSUMS, read_tensors


@cache
def whole(kind: int, old: bool) -> tuple[bytes, torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return a file, of format 2 where it is an old one, its network, inputs and what it gives for them."""
    model, x = make("1d")
    family = ("sample", "gaussian", "layerwise", "diagonal")[kind]
    bayes = mcbn.MCBN(model, "regression").fit(x, n_samples=4, batch_size=8, posterior=family)
    with tempfile.TemporaryDirectory() as folder:
        bayes.save(Path(folder) / "net.mcbn")
        if old:
            tensors, text = read_tensors(Path(folder) / "net.mcbn")
            save_file(tensors, Path(folder) / "net.mcbn", text | {"format_version": "2"})
        return (Path(folder) / "net.mcbn").read_bytes(), model, x, bayes.sample(x)


def damaged(r: random.Random, content: bytes) -> bytes:
    """Flip bits, cut, insert, overwrite or exchange bytes, change digits; at times misname the checksums."""
    changed, how = bytearray(content), r.choice(["flip", "flip", "flip", "cut", "insert", "zero", "swap", "number"])
    place, length = r.randrange(len(changed)), r.choice([1, 4, 64, 1000])
    if how == "flip":
        for _ in range(r.choice([1, 1, 1, 2, 8])):
            changed[r.randrange(len(changed))] ^= 1 << r.randrange(8)
    elif how == "cut":
        del changed[place : place + length]
    elif how == "insert":
        changed[place:place] = r.randbytes(length)
    elif how == "zero":
        changed[place : place + length] = bytes(len(changed[place : place + length]))
    elif how == "swap":
        other = r.randrange(len(changed))
        changed[place : place + 8], changed[other : other + 8] = changed[other : other + 8], changed[place : place + 8]
    else:  # another digit in the header
        digits = [i for i, byte in enumerate(changed[:4000]) if chr(byte).isdigit()]
        changed[r.choice(digits)] = ord(r.choice("0123456789-"))
    if r.random() < 0.1:
        changed = changed.replace(CHECKSUMS.encode(), b"checksome")
    return bytes(changed)


def check(seed: int) -> str:
    """Damage a file and load it."""
    r = random.Random(seed)
    old = r.random() < 0.1  # without checksums: other numbers may load, but no foreign error may come
    content, model, x, expected = whole(r.randrange(4), old)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "net.mcbn"
        path.write_bytes(damaged(r, content))
        try:
            loaded = mcbn.MCBN.load(path, model)
        except mcbn.MCBNError as error:
            return "refused" if "net.mcbn" in str(error) else f"refused without the file's name: {error}"
    same = torch.equal(loaded.sample(x), expected)
    assert same or old, "loaded with other numbers"
    return "right" if same else "old and unnoticed"
