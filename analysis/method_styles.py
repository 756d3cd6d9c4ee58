"""What tables and plots know of each method: its place, its colour and marker, and what it is compared with.

Colours begin with Okabe and Ito's, which stay apart for colour-blind readers; the marker tells the rest.
"""

METHOD_ORDER = (
    "dense",
    "oracle",
    "predictor",
    "cats",
    "teal",
    "teal-all",
    "wina-unrotated",
    "griffin",
    "static",
    "random",
)
METHOD_STYLES = {  # method -> colour, marker
    "dense": ("#000000", "o"),
    "oracle": ("#009E73", "^"),
    "predictor": ("#0072B2", "o"),
    "cats": ("#CC79A7", "D"),
    "teal": ("#D55E00", "s"),
    "teal-all": ("#5D3A9B", "*"),
    "wina-unrotated": ("#56B4E9", "P"),
    "griffin": ("#8C6D00", "h"),
    "static": ("#E69F00", "v"),
    "random": ("#7F7F7F", "X"),
}
# Their MLP density is that of attention's inputs, too, so it needs no naming.
THIN_ATTENTION = ("teal-all", "wina-unrotated")
SPARE_STYLES = (("#40B0A6", ">"), ("#994F00", "<"), ("#B8B800", "p"))
# Methods that a user could take instead; oracle, static and random are bounds.
RIVALS = ("cats", "teal", "griffin")
# Oracle knows the outputs that it saves, and random knows nothing: bounds, not methods. Dense reads everything.
NOT_RIVALS = ("dense", "oracle", "random")


def method_rank(method: str) -> int:
    return METHOD_ORDER.index(method) if method in METHOD_ORDER else len(METHOD_ORDER)
