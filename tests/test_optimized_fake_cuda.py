"""Ready for a GPU without having one: fake CUDA tensors refuse to mix devices."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>); }
"""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that registers a device guard for CUDA that does nothing."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler for the empty device guard of fake CUDA tensors")
    folder = tmp_path_factory.mktemp("guard")
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    includes = [f"-I{path}" for path in include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    links = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")] + ["-lc10"]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", abi, *includes, str(source), "-o", str(library), *links]
    subprocess.run(command, check=True)
    return library


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has a device guard for CUDA of its own")
@pytest.mark.parametrize("where", ["resident", "offload"])
def test_rollout_and_update_run_on_fake_cuda_tensors(guard: Path, where: str) -> None:
    script = Path(__file__).with_name("helpers_fake_cuda.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parent)}
    done = subprocess.run(
        [sys.executable, str(script), str(guard), where], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all on the device"
