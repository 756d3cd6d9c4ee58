"""Studies: experiments that use the stages and may be read or deleted without touching them."""
