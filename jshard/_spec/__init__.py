"""What the user wrote -> pins of tensors: strategies, parameter plans, meshes."""
