#pragma once
#include "emulation.hpp"
