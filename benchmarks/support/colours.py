"""Name the colours of all figures: of what is written, and of what should hardly be seen."""

INK, PALE = "#26323f", "#d9dee4"
