"""Write calls of cuBLAS and cuDNN for loop nests that are products of matrices or convolutions.

The libraries' functions are declared in the text, so that their headers are not needed.
"""

from collections.abc import Iterable

from components.bootstrap.loop_nest import Axis, Nest, merge

CUBLAS = """extern "C" int cublasCreate_v2(void** handle);
extern "C" int cublasSetStream_v2(void* handle, cudaStream_t stream);
extern "C" int cublasSgemmStridedBatched(void* handle, int, int, int m, int n, int k, const float* alpha,
    const float* a, int lda, long long stride_a, const float* b, int ldb, long long stride_b,
    const float* beta, float* c, int ldc, long long stride_c, int count);"""
# A convolution by cuDNN. Of its enumerations, 0 is the type float and the layout NCHW, 1 is the correlation
# that torch calls a convolution, and 3 is the math with products in float32. The first algorithm that needs
# at most 256 MB is taken.
CUDNN = """extern "C" int cudnnCreate(void** handle);
extern "C" int cudnnSetStream(void* handle, cudaStream_t stream);
extern "C" int cudnnCreateTensorDescriptor(void** tensor);
extern "C" int cudnnSetTensorNdDescriptor(void* tensor, int type, int rank, const int* sizes,
    const int* strides);
extern "C" int cudnnCreateFilterDescriptor(void** filter);
extern "C" int cudnnSetFilterNdDescriptor(void* filter, int type, int layout, int rank, const int* sizes);
extern "C" int cudnnCreateConvolutionDescriptor(void** convolution);
extern "C" int cudnnSetConvolutionNdDescriptor(void* convolution, int rank, const int* padding,
    const int* stride, const int* dilation, int mode, int type);
extern "C" int cudnnSetConvolutionGroupCount(void* convolution, int groups);
extern "C" int cudnnSetConvolutionMathType(void* convolution, int math);"""
# The struct `Convolution`, or `Transposed`, which is the gradient of a convolution for its input.
CONVOLUTION = """extern "C" int cudnnGetConvolution<KIND>Algorithm_v7(void* handle, void*, void*,
    void* convolution, void* y, int most, int* count, void* found);
extern "C" int cudnnConvolution<KIND>(void* handle, const void* alpha, void*, const void*, void*, const void*,
    void* convolution, int algorithm, void* space, size_t bytes, const void* beta, void* y, void* o);
struct <NAME> {
  using Sizes = std::vector<int>;
  struct Algorithm { int number, status; float seconds; size_t bytes; int rest[5]; };
  void *handle, *x, *filter, *y, *sizes, *space = nullptr;
  Algorithm best;
  static void* tensor(const Sizes& shape) {
    void* made;
    Sizes strides(shape.size(), 1);
    for (int i = (int)shape.size() - 2; i >= 0; --i) strides[i] = strides[i + 1] * shape[i + 1];
    cudnnCreateTensorDescriptor(&made);
    cudnnSetTensorNdDescriptor(made, 0, (int)shape.size(), shape.data(), strides.data());
    return made;
  }
  <NAME>(Sizes in, Sizes weight, Sizes out, Sizes padding, Sizes stride, Sizes dilation, int groups)
      : x(tensor(in)), y(tensor(out)) {
    cudnnCreate(&handle);
    cudnnCreateFilterDescriptor(&filter);
    cudnnSetFilterNdDescriptor(filter, 0, 0, (int)weight.size(), weight.data());
    cudnnCreateConvolutionDescriptor(&sizes);
    cudnnSetConvolutionNdDescriptor(sizes, (int)padding.size(), padding.data(), stride.data(),
        dilation.data(), 1, 0);
    cudnnSetConvolutionGroupCount(sizes, groups);
    cudnnSetConvolutionMathType(sizes, 3);
    Algorithm found[10];
    int count = 0;
    cudnnGetConvolution<KIND>Algorithm_v7(handle, <TENSORS>, sizes, y, 10, &count, found);
    best = found[0];
    for (int i = count - 1; i >= 0; --i)
      if (found[i].status == 0 && found[i].bytes <= 256 << 20) best = found[i];
    if (best.bytes) cudaMalloc(&space, best.bytes);
  }
  void run(const float* a, const float* weight, float* o, cudaStream_t stream) {
    const float one = 1, zero = 0;
    cudnnSetStream(handle, stream);
    cudnnConvolution<KIND>(handle, &one, <DATA>, sizes, best.number, space, best.bytes, &zero, y, o);
  }
};"""
# What stands for the fields of CONVOLUTION, by the name of the struct.
KINDS = {
    "Convolution": {"KIND": "Forward", "TENSORS": "x, filter", "DATA": "x, a, filter, weight"},
    "Transposed": {"KIND": "BackwardData", "TENSORS": "filter, x", "DATA": "filter, weight, x, a"},
}


def declarations(text: str) -> list[str]:
    """Return the declarations that the CUDA lines `text` need before them to call the libraries."""
    found = [CUBLAS] if "cublas" in text else []
    for name, fields in KINDS.items():
        if f"static {name} " in text:
            struct = CONVOLUTION.replace("<NAME>", name)
            for field, value in fields.items():
                struct = struct.replace(f"<{field}>", value)
            found += [struct] if CUDNN in found else [CUDNN, struct]
    return found


def library_call(nest: Nest, source: str, target: str) -> list[str]:
    """Return the C++ lines that compute a nest with `Nest.has_library` by a library.

    `source` and `target` are the C++ variables of the nest's input and output.
    """
    if nest.convolution is None:
        return _product_call(nest, source, target)
    sizes = nest.convolution
    flat = len(sizes.x) == 3  # cuDNN has no convolution over one dimension

    def listed(values: Iterable[int], more: int) -> str:
        return f"{{{', '.join(map(str, [*values, *[more] * flat]))}}}"

    shapes = ", ".join(listed(shape, 1) for shape in (sizes.x, sizes.weight, sizes.y))
    steps = f"{listed(sizes.padding, 0)}, {listed(sizes.stride, 1)}, {listed(sizes.dilation, 1)}"
    name = "Transposed" if sizes.transposed else "Convolution"
    return [
        "{",
        f"  static {name} convolution({shapes},",
        f"      {steps}, {sizes.groups});",
        f"  convolution.run({source}, {sizes.operand}, {target}, (cudaStream_t)stream);",
        "}",
    ]


def _product_call(nest: Nest, source: str, target: str) -> list[str]:
    """Return the C++ lines that compute a loop nest, which is a product of matrices, by cuBLAS.

    `source` and `target` are the C++ variables of the first factor and of the product.
    """
    axes = {axis.name: axis for axis in nest.axes}
    batches = [axis for axis in merge(nest).axes if axis.name not in "ijk"]
    batch = batches[0] if batches else Axis("b", 1, False, {})
    i, j, k = (axes[name] for name in "ijk")
    (right,) = nest.operands

    def side(outer: Axis, tensor: str) -> tuple[bool, int]:
        """Return whether neighbours on `outer` are neighbours in memory, and the leading dimension."""
        across, along = outer.strides[tensor], k.strides[tensor]
        return (True, max(along, outer.size)) if across == 1 else (False, max(across, k.size))

    # cuBLAS has columns first, so that it computes the transposed product with the factors swapped.
    (plain, lead_b), (transposed, lead_a) = side(j, right), side(i, "a")
    steps = {name: batch.strides.get(name, 0) for name in ("a", "o", right)}
    return [
        "{",
        "  static void* handle = nullptr;",
        "  if (handle == nullptr) cublasCreate_v2(&handle);",
        "  cublasSetStream_v2(handle, (cudaStream_t)stream);",
        "  const float one = 1, zero = 0;",
        f"  cublasSgemmStridedBatched(handle, {int(not plain)}, {int(transposed)}, {j.size}, {i.size},",
        f"      {k.size}, &one, {right}, {lead_b}, {steps[right]}, {source}, {lead_a}, {steps['a']},",
        f"      &zero, {target}, {j.size}, {steps['o']}, {batch.size});",
        "}",
    ]
