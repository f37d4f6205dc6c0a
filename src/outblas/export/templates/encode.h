// A row-major matrix as TMA reads or writes it: extents, distance of rows (elements), bytes from the operand's address.
// The box of one copy (elements) and its swizzle follow. Eight maps of an operand have every eighth row each.
struct Map {
  unsigned rows, cols, pitch, offset, box_rows, box_cols;
  CUtensorMapSwizzle swizzle;
};
@MAPS@

inline CUresult encode(CUtensorMap* map, CUdeviceptr address, const Map& of) {
  const cuuint64_t extents[2] = {of.cols, of.rows}, pitch[1] = {cuuint64_t{of.pitch} * @ELEMENT_BYTES@};
  const cuuint32_t box[2] = {of.box_cols, of.box_rows}, steps[2] = {1, 1};
  return OUTBLAS_DRIVER(cuTensorMapEncodeTiled)(
      map, @KIND@, 2, reinterpret_cast<void*>(address + of.offset), extents, pitch, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, of.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
