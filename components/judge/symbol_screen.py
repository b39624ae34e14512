"""Screening of the symbols that the library of a candidate imports, before any of its code runs.

A candidate is an implementation of a task's module that is judged. Its sources are screened by screen.py.
"""

import re

ALLOWED_SYMBOLS = re.compile(
    r"""(?x)^(?:
    _?Py(?!Run_|_?Compile|Eval_Eval|Capsule_Import|Import_(?!ImportModule$)|Marshal)\w+
    | _ZN?K?R?St\w* | _ZNKS\w+ | _ZNS[atsiod]\w* | _ZS[atsiod]\w* | _ZT[VIST]\w+
    | _Z(?:nw|na|dl|da)\w+ | __cxa_\w+ | __gxx_personality_v0 | _Unwind_\w+
    | __(?:stack_chk_fail|errno_location|tls_get_addr|gmon_start__|assert_fail|sched_cpucount) | _ITM_\w+
    | __(?:extendhf[sdxt]f2 | trunc[sdxt]fhf2 | (?:eq|ne|lt|le|gt|ge)hf2)  # _Float16
    | (?:mem(?:cpy|move|set|cmp|chr)|str(?:len|cmp|ncmp|cpy|ncpy|chr|rchr|dup)|__mem\w+_chk|__str\w+_chk
        |__v?[sf]?n?printf_chk|v?snprintf|strerror|abort|exit)
    | _ZN2at4_ops\d+
        (?:empty_memory_format|empty_like|empty_strided|new_empty|zeros|zeros_like|view|reshape|contiguous
        |transpose_int|permute|expand|squeeze|squeeze_dim|unsqueeze|flatten_using_ints|select_int|slice_Tensor
        |narrow|t|detach)
        4call\w+
    | _ZN2at(?:8internal)?\d+
        (?:(?:get|set)_thread_num|get_num_threads|in_parallel_region|(?:lazy_)?init_num_threads)E\w+
    | _ZN5torch(?:16PyWarningHandler|29translate_exception_to_python)\w+ | __dynamic_cast
    | _ZNR?5torch(?:7Library|11CppFunction|3jit\d+parse(?:Schema|Name|SchemaOrName)E)\w+
    | _ZNK?2at10TensorBase\w* | _ZN?K?8pybind116detail\w+ | _ZNK?6caffe28TypeMeta\w+
    | _ZNK?3c10(?!\w*(?:Dispatcher|OperatorHandle|DynamicLibrary|AsyncTask|ThreadPool))\w+
    | (?:fflush|f?printf|f?putc|putchar|f?puts|fwrite|stdout|stderr|pthread_mutex_(?:un)?lock
        |pthread_once|__once_proxy|__libc_single_threaded)
    | (?:malloc|free|calloc|realloc|aligned_alloc|posix_memalign|qsort|bsearch)
    | (?:GOMP|omp|__kmpc)_\w+
    | (?:a?(?:sin|cos|tan)h?|atan2|exp|exp2|expm1|log|log2|log10|log1p|pow|sqrt|cbrt|hypot|erf|erfc|tgamma
        |lgamma|ceil|floor|round|trunc|rint|nearbyint|l?lround|l?lrint|fmod|remainder|fabs|fmax|fmin|fdim|fma
        |ldexp|frexp|modf|logb|ilogb|scalbn|copysign|nextafter|sincos|isnan|isinf|finite)f?
    | _ZGV\w+
    | cuda(?!Ipc|Import|Export|Profiler|DeviceSetLimit|DeviceReset|CtxReset|DeviceEnablePeer)\w+
    | __cuda\w+ | cublas\w+ | cudnn\w+
    )$"""
)


# Symbols of C++ streams and paths of files, among those of the standard library.
FILES = re.compile("filebuf|fstream|10filesystem")


def screen_symbols(symbols: tuple[str, ...], binding: frozenset[str]) -> str | None:
    """Return the reason why a library that imports `symbols` is forbidden, or None if it is allowed.

    The library is the shared library that was built from a candidate's C++ or CUDA sources. The reason names
    the first forbidden symbol, such as `symbol:dlopen`. A library may import the symbols that
    `ALLOWED_SYMBOLS` matches, and those in `binding`. These are the imports of the judge's own binding
    module, which is linked to the libraries of kernels/.
    """
    for symbol in symbols:
        name = symbol.partition("@")[0]  # without its version, such as @GLIBC_2.2.5
        if name not in binding and (not ALLOWED_SYMBOLS.match(name) or FILES.search(name)):
            return f"symbol:{name}"
    return None
