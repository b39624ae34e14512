"""The rules for mining operators of torch: values of arguments, templates written by hand, excluded names.

Mining (mine_torch.py) tries torch's public operators in order to find those of which tasks can be composed. A
template is the source of one call of an operator, with fields such as `{x}` for the input.
"""

# Values of arguments by the name of the argument. The first value is used for a required argument. Each other
# value, and each value of an optional argument, gives a further template.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "num_features": ("{channels}",),
    "num_channels": ("{channels}",),
    "num_groups": ("4", "2", "8"),
    "groups": ("4", "2"),
    "in_channels": ("{channels}",),
    "out_channels": ("{channels}", "{twice_channels}", "{half_channels}"),
    "in_features": ("{last}",),
    "out_features": ("{last}", "{twice_last}", "{half_last}"),
    "input_size": ("{last}",),
    "hidden_size": ("{last}", "{half_last}"),
    "embed_dim": ("{last}",),
    "num_heads": ("4", "8"),
    "d_model": ("{last}",),
    "nhead": ("4", "8"),
    "dim_feedforward": ("{twice_last}",),
    "batch_first": ("True",),
    "kernel_size": ("3", "2", "5"),
    "output_size": ("4", "2", "7"),
    "normalized_shape": ("({last},)",),
    "num_parameters": ("{channels}",),
    "size": ("5", "3"),
    "norm_type": ("2", "1"),
    "upscale_factor": ("2",),
    "downscale_factor": ("2",),
    "scale_factor": ("2", "3"),
    "mode": ('"bilinear"', '"bicubic"', '"trilinear"', '"linear"'),
    "padding": ("1", "2", "(1, 2)"),
    "pad": ("(1, 2)", "(2, 1, 0, 3)"),
    "stride": ("2",),
    "dilation": ("2",),
    "bias": ("False",),
    "affine": ("True",),
    "elementwise_affine": ("False",),
    "dim": ("-1", "1", "0", "-2"),
    "dims": ("(-1, -2)", "(1,)", "(0, 1)"),
    "dim0": ("1",),
    "dim1": ("-1",),
    "axis0": ("1",),
    "axis1": ("-1",),
    "source": ("1",),
    "destination": ("-1",),
    "keepdim": ("True",),
    "descending": ("True",),
    "unbiased": ("False",),
    "correction": ("0",),
    "negative_slope": ("0.1", "0.2", "0.3"),
    "alpha": ("0.5", "1.5"),
    "beta": ("2.0", "0.5"),
    "lambd": ("0.25", "0.4"),
    "threshold": ("0.1", "0.5"),
    "value": ("0.5", "1.5"),
    "min": ("-0.5", "0.25"),
    "max": ("0.75", "1.5"),
    "min_val": ("-0.5", "-2.0"),
    "max_val": ("0.75", "2.0"),
    "exponent": ("2.0", "3.0"),
    "weight": ("0.3", "0.7"),
    "delta": ("0.5",),
    "margin": ("0.5",),
    "eps": ("1e-4",),
    "p": ("1", "3"),
    "approximate": ('"tanh"',),
    "k": ("4", "2", "1"),
    "n": ("1", "2"),
    "shifts": ("3", "1"),
    "diagonal": ("1", "-1"),
    "offset": ("1",),
    "repeats": ("2", "3"),
    "reps": ("(1, 2)", "(2, 1)"),
    "q": ("0.5", "0.9"),
    "ceil_mode": ("True",),
    "count_include_pad": ("False",),
    "log_target": ("True",),
    "start_dim": ("1", "2"),
    "end_dim": ("-2",),
    "decimals": ("1",),
    "maxnorm": ("1.0",),
    "align_corners": ("True",),
}
# Arguments that are always passed, so that losses are not reduced and no random numbers are drawn.
FORCED = {"reduction": '"none"', "batch_first": "True", "dropout": "0.0"}
SECOND_INPUTS = frozenset("other target y input2 x2 end tensor2 mat2 tensor1 batch2 vec2".split())
FIRST_INPUTS = frozenset("self input x x1 input1 tensor a".split())

# Templates (init, call) written by hand for operators whose signature is not sufficient.
HAND_WRITTEN: dict[str, tuple[tuple[str, str], ...]] = {
    "torch.matmul": (
        ("", "torch.matmul({x}, {y}.transpose(-1, -2))"),
        ("", "torch.matmul({x}.transpose(-1, -2), {y})"),
    ),
    "torch.mm": (("", "torch.mm({x}, {y}.t())"), ("", "torch.mm({x}.t(), {y})")),
    "torch.bmm": (("", "torch.bmm({x}, {y}.transpose(1, 2))"), ("", "torch.bmm({x}.transpose(1, 2), {y})")),
    "torch.einsum": (
        ("", 'torch.einsum("...ij,...kj->...ik", {x}, {y})'),
        ("", 'torch.einsum("...ij,...ij->...i", {x}, {y})'),
    ),
    "torch.where": (("", "torch.where({x} > 0.0, {x}, {y})"), ("", "torch.where({x} > {y}, {x}, 0.5 * {x})")),
    "torch.masked_fill": (
        ("", "torch.masked_fill({x}, {x} > 1.0, 0.5)"),
        ("", "torch.masked_fill({x}, {y} > 0.5, -1.0)"),
    ),
    "torch.addcmul": (("", "torch.addcmul({x}, {x}, {y}, value=0.5)"),),
    "torch.cat": (("", "torch.cat([{x}, {y}], dim=1)"), ("", "torch.cat([{x}, {y}], dim=-1)")),
    "torch.stack": (("", "torch.stack([{x}, {y}], dim=1)"), ("", "torch.stack([{x}, {y}], dim=2)")),
    "torch.gather": (("", "torch.gather({x}, -1, torch.argsort({y}, dim=-1))"),),
    "torch.take_along_dim": (("", "torch.take_along_dim({x}, torch.argsort({y}, dim=1), dim=1)"),),
    "torch.cdist": (("", "torch.cdist({x}, {y})"), ("", "torch.cdist({x}, {y}, p=1.0)")),
    "F.linear": (
        ("nn.Parameter(torch.randn({last}, {last}) * {last} ** -0.5)", "F.linear({x}, {self})"),
        ("nn.Parameter(torch.randn({half_last}, {last}) * {last} ** -0.5)", "F.linear({x}, {self})"),
    ),
    "F.conv1d": (
        (
            "nn.Parameter(torch.randn({channels}, {channels}, 3) * (3 * {channels}) ** -0.5)",
            "F.conv1d({x}, {self}, padding=1)",
        ),
    ),
    "F.conv2d": (
        (
            "nn.Parameter(torch.randn({channels}, {channels}, 3, 3) * (9 * {channels}) ** -0.5)",
            "F.conv2d({x}, {self}, padding=1)",
        ),
        (
            "nn.Parameter(torch.randn({channels}, 1, 3, 3) / 3.0)",
            "F.conv2d({x}, {self}, padding=1, groups={channels})",
        ),
    ),
    "F.prelu": (("nn.Parameter(torch.rand({channels}) * 0.5)", "F.prelu({x}, {self})"),),
    "F.scaled_dot_product_attention": (
        ("", "F.scaled_dot_product_attention({x}, {y}, {y})"),
        ("", "F.scaled_dot_product_attention({x}, {x}, {y}, is_causal=True)"),
    ),
    "F.interpolate": (
        ("", 'F.interpolate({x}, scale_factor=2.0, mode="nearest")'),
        ("", 'F.interpolate({x}, scale_factor=2.0, mode="bilinear", align_corners=False)'),
        ("", 'F.interpolate({x}, scale_factor=0.5, mode="area")'),
    ),
    "nn.MultiheadAttention": (
        (
            "nn.MultiheadAttention({last}, 4, batch_first=True)",
            "{self}({x}, {x}, {x}, need_weights=False)[0]",
        ),
        (
            "nn.MultiheadAttention({last}, 8, batch_first=True)",
            "{self}({x}, {y}, {y}, need_weights=False)[0]",
        ),
    ),
    "nn.Conv2d": (
        ("nn.Conv2d({channels}, {channels}, 3, padding=1, groups={channels})", "{self}({x})"),
        ("nn.Conv2d({channels}, {twice_channels}, 1)", "{self}({x})"),
        ("nn.Conv2d({channels}, {channels}, 3, padding=1)", "{self}({x})"),
    ),
    "nn.Conv1d": (("nn.Conv1d({channels}, {channels}, 7, padding=3, groups={channels})", "{self}({x})"),),
    "nn.Bilinear": (("nn.Bilinear({last}, {last}, {half_last})", "{self}({x}, {y})"),),
}
# Patterns of the names that are not mined, by the reason.
EXCLUDED: dict[str, str] = {
    "works in place; its form without the underscore stands for it": r"\w+_",
    "a backend's own form of another operator": (
        r"(mkldnn|cudnn|miopen|fbgemm|quantized|native|sparse|fused|sym)_\w+"
        r"|\w+_(copy|scatter)|convolution|batch_norm_\w+"
    ),
    "quantised tensors; tasks are float32": (
        r"(q_per|q_|quantize_|fake_quantize|choose_q|int_repr|dequantize)\w*"
    ),
    "takes its sizes from the first input; its eager form stands for it": r"Lazy\w+",
    "a container or base class, no operator": (
        r"Module|ModuleList|ModuleDict|ParameterList|ParameterDict|Sequential|Container"
        r"|DataParallel|RNNBase|RNNCellBase|SyncBatchNorm"
    ),
    "a stack of many operators, or a loop over time steps; the cells are mined": (
        r"LSTM|GRU|RNN|Transformer\w*"
    ),
    "no operator": (
        r"(handle|has)_torch_function\w*|assert_int_or_pair|boolean_dispatch|Optional"
        r"|Tensor|torch|save|\w*seed|from_file|wait|range"
    ),
    "a decomposition, ill-conditioned on random matrices": (
        r"(cholesky|lu|qr|svd|logdet|slogdet|inverse|pinverse|orgqr|ormqr|geqrf"
        r"|triangular_solve|nuclear_norm)\w*|det"
    ),
    "jumps: rounding decides on which side": (
        r"floor_divide|fmod|remainder|frac|round|nextafter|frexp|ceil|floor|trunc|fix|sgn|sign|copysign|mode"
    ),
    "gives its input back, or a view of it": (
        r"as_tensor|clone|detach|positive|real|conj\w*|resolve_\w+|atleast_\dd|adjoint"
    ),
    "exposes memory and not values": r"as_strided\w*|resize_as\w*|empty_like|set_\w+|hash_tensor|unsafe_\w+",
}
