"""The dense decoder on one device, with two seams (selection, residual junction) that everything else plugs into."""
