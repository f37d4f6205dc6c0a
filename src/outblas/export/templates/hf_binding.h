#pragma once
#include <torch/torch.h>

void gemm(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);
