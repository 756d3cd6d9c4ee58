def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Ctrl-C while a stage is still being imported, which takes seconds, is one line as it is later."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _excepthook
