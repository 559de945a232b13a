"""How executed notebooks become pages: nbconvert exporters, their preprocessors and filters."""


class ReportError(RuntimeError):
    """The report cannot be rendered; the message says why and what to do."""
