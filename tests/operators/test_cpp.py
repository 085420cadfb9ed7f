"""An operator in C++: right, strided or not, compiled once by many, and clear about faults."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.errors import CompilerError, UsageError
from weft.operators import compile as compile_module
from weft.operators import cpp_operator
from weft.operators.cpp import TYPES

# out 0: x * factor + shift, out 1: the sum of x. x may have any strides.
SOURCE = """
#include <weft/operator.h>

static int64_t offset(const weft::Tensor& t, int64_t position) {
    int64_t sum = 0;
    for (int i = t.rank - 1; i >= 0; --i) {
        sum += position % t.shape[i] * t.strides[i];
        position /= t.shape[i];
    }
    return sum;
}

const char* forward(const weft::Tensor* in, weft::Tensor* out, const weft::Call* call) {
    return weft::with_floating(in[0].type, [&](auto zero) {
        using T = decltype(zero);
        T total = 0;
        for (int64_t i = 0; i < in[0].size(); ++i) {
            const T x = in[0].as<T>()[offset(in[0], i)];
            out[0].as<T>()[i] = x * T(call->attributes[0].real) + T(call->attributes[1].integer);
            total += x;
        }
        out[1].as<T>()[0] = total;
    });
}

const char* backward(const weft::Tensor* grads, const weft::Tensor* in, const weft::Tensor* out,
                     weft::Tensor* in_grads, const weft::Call* call) {
    return weft::with_floating(in[0].type, [&](auto zero) {
        using T = decltype(zero);
        for (int64_t i = 0; i < in[0].size(); ++i)
            in_grads[0].as<T>()[i] =
                grads[0].as<T>()[offset(grads[0], i)] * T(call->attributes[0].real) + grads[1].as<T>()[0];
    });
}
"""


def affine(x: Tensor, factor: float = 2.0, shift: int = 1) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(())


def make(name: str, source: str | Path = SOURCE, **options: Any) -> Any:
    return cpp_operator(source, affine, name=f"tests::{name}", **options)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cpp_operator_values_and_gradients(dtype: torch.dtype, contiguous: bool) -> None:
    operator = make(f"affine_{contiguous}".lower(), contiguous=contiguous)
    base = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    x = base.t()
    scaled, total = operator(x, 3.0, 2)
    torch.testing.assert_close(scaled, 3 * x + 2)
    torch.testing.assert_close(total, x.sum())
    (gradient,) = torch.autograd.grad(scaled.square().sum() + 5 * total, [base])
    torch.testing.assert_close(gradient, 6 * (3 * base + 2) + 5)


def test_arguments_equal_to_their_defaults_arrive() -> None:
    scaled, _ = make("affine_defaults")(torch.ones(2), 2.0, 1)
    assert scaled.tolist() == [3.0, 3.0]


def test_torch_agrees_with_its_registration() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    results = torch.library.opcheck(make("affine_opcheck").overload, (x, 3.0, 2))
    assert set(results.values()) == {"SUCCESS"}


def test_cpp_operator_under_torch_compile() -> None:
    operator = make("affine_compiled")
    x = torch.randn(5, requires_grad=True)
    compiled = torch.compile(lambda x: operator(x, 3.0, 2)[0].sin().sum(), fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(x), [x])
    torch.testing.assert_close(gradient, 3 * (3 * x + 2).cos())
    torch.compiler.reset()


def test_cpp_operator_may_use_openmp(tmp_path: Path) -> None:
    source = """
    #include <omp.h>
    #include <weft/operator.h>
    const char* forward(const weft::Tensor* in, weft::Tensor* out, const weft::Call* call) {
        #pragma omp parallel num_threads(2)
        out[0].as<float>()[omp_get_thread_num()] = in[0].as<float>()[omp_get_thread_num()] + omp_get_num_threads();
        return nullptr;
    }
    """
    (tmp_path / "threads.cpp").write_text(source)

    def threads(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    operator = cpp_operator(tmp_path / "threads.cpp", threads, name="tests::threads", backward=False)
    assert operator(torch.zeros(2)).tolist() == [2.0, 2.0]


def test_what_the_compiler_says_holds_the_line_of_the_source() -> None:
    broken = make("affine_broken", SOURCE.replace("T total = 0;", "T total = banana;"))
    with pytest.raises(CompilerError, match=r"(?s)cpp:\d+:\d+: error.*banana.*T total = banana;"):
        broken(torch.ones(2))


def test_a_function_with_another_signature_does_not_compile() -> None:
    source = "#include <weft/operator.h>\nconst char* forward(int x) { return nullptr; }"
    with pytest.raises((CompilerError, UsageError), match="forward"):
        make("affine_signature", source)(torch.ones(2))


def test_a_missing_backward_is_named() -> None:
    cut = SOURCE[: SOURCE.index("const char* backward")]
    operator = make("affine_forward_only", cut)
    with pytest.raises(UsageError, match="function: backward"):
        operator(torch.ones(2, requires_grad=True))[0].sum().backward()


def test_what_the_source_refuses_is_said_in_its_words() -> None:
    with pytest.raises(UsageError, match="neither float32 nor float64"):
        make("affine_refuses")(torch.ones(2, dtype=torch.int64))


def test_a_type_that_cpp_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match="complex64"):
        make("affine_complex")(torch.ones(2, dtype=torch.complex64))


def test_an_argument_that_is_no_number_is_refused() -> None:
    def named(x: Tensor, mode: str) -> Tensor:
        return torch.empty_like(x)

    with pytest.raises(UsageError, match="'fast'"):
        cpp_operator(SOURCE, named, name="tests::named_mode")(torch.ones(2), "fast")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.cpp"):
        make("affine_absent", tmp_path / "absent.cpp")(torch.ones(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_a_cuda_source_needs_its_compiler(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text(SOURCE)
    with pytest.raises(CompilerError, match="nvcc"):
        make("affine_cuda", tmp_path / "a.cu")(torch.ones(2))


def test_types_stand_in_the_order_of_the_header() -> None:
    header = (Path(sys.modules["weft.operators.cpp"].__file__ or "").parent / "include/weft/operator.h").read_text()
    names = header.partition("enum class Type : int32_t {")[2].partition("}")[0].split(",")
    spelt = [str(dtype).removeprefix("torch.").replace("bool", "boolean") for dtype in TYPES]
    assert [name.strip() for name in names] == spelt


def test_processes_that_use_it_first_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    # The compiler's module alone: the package around it imports torch, for seconds.
    program = (
        "import ctypes, runpy; from pathlib import Path\n"
        f"names = runpy.run_path({compile_module.__file__!r})\n"
        f"library = names['compile_library']([Path({str(tmp_path / 'answer.cpp')!r})])\n"
        "print(ctypes.CDLL(str(library)).answer())"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [rank.communicate()[0].strip() for rank in ranks] == ["42", "42"]
    assert len(list((tmp_path / "weft").iterdir())) == 1
