# SPDX-License-Identifier: Apache-2.0
"""Ways to change an image after it was built, each with a part of the path that ``verify`` has to name."""

from __future__ import annotations

from b12x_overlay.image import manifest

VLLM = "$(python3 -c 'import importlib.util as u; print(u.find_spec(\"vllm\").submodule_search_locations[0])')"
_SITE = "$(python3 -c 'import site; print(site.getsitepackages()[0])')"
_FOLDER = "folder = pathlib.Path(importlib.util.find_spec('vllm').submodule_search_locations[0])"
_MODELOPT = "model_executor/layers/quantization/modelopt.py"


def _python(*lines: str) -> str:
    """A shell command that runs *lines*."""
    return "\n".join(["python3 - <<'EOF'", *lines, "EOF"])


_WITH_RECORD = _python(
    "import base64, hashlib, importlib.util, pathlib, re",
    _FOLDER,
    "file = folder / 'version.py'",
    "file.write_bytes(file.read_bytes() + b'#')",
    "digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode().rstrip('=')",
    "record = next(folder.parent.glob('vllm-*.dist-info')) / 'RECORD'",
    "row = f'vllm/version.py,sha256={digest},1'",
    "record.write_text(re.sub(r'(?m)^vllm/version.py,.*$', row, record.read_text()))",
)
_BYTECODE = _python(
    "import importlib.util, pathlib, py_compile",
    _FOLDER,
    f"cached = importlib.util.cache_from_source(str(folder / '{_MODELOPT}'))",
    "pathlib.Path('/tmp/other.py').write_text('x = 1')",
    "mode = py_compile.PycInvalidationMode.UNCHECKED_HASH",
    "py_compile.compile('/tmp/other.py', cached, invalidation_mode=mode)",
)
_SHADOW = (
    "mkdir -p /tmp/other/vllm && touch /tmp/other/vllm/__init__.py && "
    f"printf 'import sys; sys.path.insert(0, \"/tmp/other\")' > {_SITE}/first.pth"
)
_ARCHITECTURE = (
    f'sed -i \'s/"x86_64"/"mips"/; s/"aarch64"/"mips"/\' {manifest.FOLDER}/manifest.json'
)

TAMPERED: dict[str, tuple[str, str]] = {
    "one byte of a patched file": (f"printf '#' >> {VLLM}/{_MODELOPT}", "modelopt.py"),
    "one byte of another file": (f"printf '#' >> {VLLM}/version.py", "version.py"),
    "a compiled file": (f"f=$(ls {VLLM}/*.so | head -1); printf x >> $f", ".so"),
    "a file removed": (f"rm {VLLM}/version.py", "version.py"),
    "a file added": (f"printf 'x = 1' > {VLLM}/sitepatch.py", "sitepatch.py"),
    "a file turned into a link": (
        f"cd {VLLM} && cp version.py /tmp/v.py && ln -sf /tmp/v.py version.py",
        "version.py",
    ),
    "a file and its RECORD row": (_WITH_RECORD, "RECORD"),
    "bytecode of other source": (_BYTECODE, "modelopt"),
    "another vllm before it on the path": (_SHADOW, "/tmp/other"),
    "the manifest": (_ARCHITECTURE, "manifest.json"),
    "the doctor": (f"printf x >> {manifest.FOLDER}/doctor", "doctor"),
}
"""Name -> (shell script to run in a container, what the fault's path contains)."""
