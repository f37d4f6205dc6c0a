#define @ENTRY@ outblas_@NAME@_entry
@SOURCE@
// The kernel as the launchers' translation unit knows it.
const void* outblas_@NAME@() { return reinterpret_cast<const void*>(@ENTRY@); }
