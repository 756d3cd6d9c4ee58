"""What tables and plots know of each method: its place, its colour and marker, and what it is compared with.

The methods say it themselves (`sparse_predictor/methods`). Colours begin with Okabe and Ito's, which stay apart for
colour-blind readers; the marker tells the rest.
"""

from sparse_predictor.methods.registry import all_methods, method_names, thins_attention

METHOD_STYLES = {"dense": ("#000000", "o")}  # method -> colour, marker
METHOD_STYLES |= {name: (method.colour, method.marker) for name, method in all_methods().items()}
# Their MLP density is that of attention's inputs, too, so it needs no naming.
THIN_ATTENTION = tuple(name for name in all_methods() if thins_attention(name))
SPARE_STYLES = (("#40B0A6", ">"), ("#994F00", "<"), ("#B8B800", "p"))
# Methods that a user could take instead of a predictor, and that are about MLPs alone, as it is.
RIVALS = tuple(
    name for name, method in all_methods().items() if method.role == "published" and method.blocks == ("mlp",)
)
# Oracle knows the outputs that it saves, and random knows nothing: bounds, not methods. Dense reads everything.
NOT_RIVALS = ("dense", *(name for name, method in all_methods().items() if method.role == "bound"))
# Older records have older names.
RENAMED_METHODS = {method.formerly[0]: name for name, method in all_methods().items() if method.formerly is not None}


def method_rank(method: str) -> int:
    return method_names().index(method) if method in method_names() else len(method_names())
