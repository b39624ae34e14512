"""Write calls of cuBLAS and cuDNN for loop nests that are products of matrices or convolutions.

The functions and classes that are called are those of agent_workdir/cuda_libraries.h.
"""

from collections.abc import Iterable

from components.bootstrap.loop_nest import Axis, Nest, merge
from components.bootstrap.size import bare


def library_call(nest: Nest, source: str, target: str) -> list[str]:
    """Return the C++ lines that compute a nest with `Nest.has_library` by a library.

    `source` and `target` are the C++ variables of the nest's input and output.
    """
    if nest.convolution is None:
        return [_product_call(nest, source, target)]
    sizes = nest.convolution

    def listed(values: Iterable[int]) -> str:
        return f"{{{', '.join(map(bare, values))}}}"

    shapes = ", ".join(map(listed, (sizes.x, sizes.weight, sizes.y)))
    steps = ", ".join(map(listed, (sizes.padding, sizes.stride, sizes.dilation)))
    name = "TransposedConvolution" if sizes.transposed else "Convolution"
    return [
        f"static {name} of_{target}({shapes}, {steps}, {sizes.groups});",
        f"of_{target}.run({source}, {sizes.operand}, {target}, stream);",
    ]


def _product_call(nest: Nest, source: str, target: str) -> str:
    """Return the C++ line that computes a loop nest, which is a product of matrices, by cuBLAS.

    `source` and `target` are the C++ variables of the first factor and of the product.
    """
    axes = {axis.name: axis for axis in nest.axes}
    batches = [axis for axis in merge(nest).axes if axis.name not in "ijk"]
    batch = batches[0] if batches else Axis("b", 1, False, {})
    i, j, k = (axes[name] for name in "ijk")
    (right,) = nest.operands

    def matrices(data: str, tensor: str, row: Axis, column: Axis) -> str:
        strides = [axis.strides.get(tensor, 0) for axis in (row, column, batch)]
        return f"{{{', '.join([data, *map(bare, strides)])}}}"

    sizes = ", ".join(bare(axis.size) for axis in (i, j, k))
    factors = f"{matrices(source, 'a', i, k)}, {matrices(right, right, k, j)}"
    return f"matrix_product({sizes}, {factors}, {target}, {bare(batch.size)}, stream);"
