#pragma once
struct half {
  unsigned short bits;
};
