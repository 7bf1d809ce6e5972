"""Library of kernels: vectors, memory access, panels. Its modules load when something compiles."""
