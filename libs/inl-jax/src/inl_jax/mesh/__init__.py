"""Models divided over several devices: one program, meshes of up to three axes."""
